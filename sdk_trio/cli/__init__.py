"""The command line: ``sdk-trio`` and ``python -m sdk_trio``.

The file of a group has the arguments, functions and rows of its commands; ``commands`` is the table
of all of them. A group is imported when one of its commands is chosen.
"""
