"""The same training with a request's features once a request, and once an impression.

architectures.py  what is trained             forms.py     how it arrives: requests, impressions, inverse indices
pools.py          made-up requests, logs      training.py  a step, timed
logs.py           logs as samples             counting.py  FLOPs and bytes
rebatch.py        the adapter (ROO paper)
long_history.py   HSTU where a history is long
"""
