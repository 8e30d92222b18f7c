"""`roostream checkpoint`: list, verify, export, import and roll back commits; exchange embedding rows with
TorchRec."""
