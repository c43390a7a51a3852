"""`genesis report`: one self-contained HTML page about one run or several, from the files that a run leaves."""
