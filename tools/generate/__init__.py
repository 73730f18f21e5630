"""Programs that write files of this repository: tables, documents, golden outputs."""
