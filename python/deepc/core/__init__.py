"""The C core as Python sees it: the library and its structures, errors' statuses, dtypes, memory, operators; files."""
