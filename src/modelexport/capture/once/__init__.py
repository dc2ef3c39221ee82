"""Equal work is done once, and work whose result an export does not read is left out. The file is the same without.

`--no-reuse` turns all of it off; each part is a row of ``capture/patches.py`` whose use is ``once``.
"""
