"""Its files in the compiled folder."""

DS_CONFIG = "ds_config.json"
AUTOTP_FILE = "ds_config.autotp.json"
ACCELERATE = "accelerate"
