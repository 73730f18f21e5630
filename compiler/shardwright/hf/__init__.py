"""How a Hugging Face model is taken apart: shared by the compile's probe and the runtime. Imports
torch."""
