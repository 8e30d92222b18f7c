"""The past: samples and corrections from their topics in files that readers choose columns and days of."""
