"""Forged inputs of strangers, generated from a seed: what every command must refuse in one line, or take as it is.

    python -m tests.forged DIRECTORY SEED [KIND ...] [--every N] [--only REGEX] [--results FILE]

A case is an operator on a sound input and a command. Each runs in a process that is forked from one with all imports
done (`runner.py`), and is watched: exit status, lines and characters of its output, processor time, memory, files
outside of its output, processes that are left, and code that ran.

    sound.py       the sound inputs            operators.py   what is done to a file, to bytes and to JSON
    imports.py     models for `import`         templates.py   chat templates for `data prepare`
    manifests.py   mirrors, corpora, runs      sources.py     files of data
    families.py    models of other families    requests.py    raw HTTP for `serve`
    runner.py      the processes, and what is wrong with how they ended
"""
