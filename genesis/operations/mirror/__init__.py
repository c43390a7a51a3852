"""Copies of a run's checkpoints and history in a second place: `genesis mirror`, and the way back.

    mirror.py    one mirror: claim, copy, verify, remove      plan.py           what is copied and removed: pure
    places.py    a directory, or a prefix in a store          contents.py       what a place holds, and its verification
    transfer.py  bytes to and from a place, and their hashes  listing.py        what a checkpoint's manifest lists
    history.py   copies of events, log, recipes, crashes      history_files.py  these files at one moment
    restore.py   back into a run, verified by the engine      status.py         what others may know of a mirror
    process.py   `genesis mirror` beside a supervised run     metrics.py        how far a mirror is behind

The supervisor knows nothing of mirrors: `process.py` is an `Observer` of it.
"""
