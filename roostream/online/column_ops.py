"""What a number of an entity's row may be (event_rows.py)."""

WINDOW_STEPS = 12
NEWEST_OF_ALL, SUM, SHARE, NEWEST, FIRST, VALUE, VALUE_MS, STEP, SLOT = range(9)
