"""`roostream checkpoint`: commits as they lie in a store and in the homes of shards.

checkpoint_command.py  the command    checkpoints.py        list, verify, copy    checkpoint_import.py   a copy on another Kafka
collection_files.py    rows as TorchRec keeps them; collection_import.py, collection_export.py: into an empty home, and out
"""
