"""Sources of text: named sources, their files, and the documents in these files.

A source's files are cut into *spans*, each of which can be read alone: a range of bytes of an uncompressed file of
records, a range of row groups of a parquet file, or a whole file. Reading all spans in order gives every document once.

A file may lie in a store (`genesis.data.remote`): it is then listed there and read from its copy in the local cache
(`genesis.data.cache`), which is made when a span of it is first read.

    options.py     what a source is          files.py     its files, and parts of them
    blocks.py      a file's bytes, in blocks and cut at a delimiter
    records.py     entries of text and jsonl files        tables.py    entries of parquet and arrow files
    read.py        spans of all kinds of files, and their entries and documents        sample.py    a share of them
"""

from genesis.data.sources.entry import DamagedFileError, Document, Entry
from genesis.data.sources.files import InputFile, Span, check_unchanged, find_files
from genesis.data.sources.options import SourceOptions, check_sources, refuse_conversations
from genesis.data.sources.read import is_cheap_to_reopen, plan_spans, read_documents, read_entries
from genesis.data.sources.sample import sample_texts

__all__ = [
    "DamagedFileError",
    "Document",
    "Entry",
    "InputFile",
    "SourceOptions",
    "Span",
    "check_sources",
    "check_unchanged",
    "find_files",
    "is_cheap_to_reopen",
    "plan_spans",
    "read_documents",
    "read_entries",
    "refuse_conversations",
    "sample_texts",
]
