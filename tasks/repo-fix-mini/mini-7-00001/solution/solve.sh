#!/bin/bash
set -eu
cat > /tmp/fix.py <<'END'
import pathlib

path = pathlib.Path("/app") / 'cliff/camp.py'
text = path.read_text()
old, new = 'return album + 83', 'return album * 83'
assert text.count(old) == 1
path.write_text(text.replace(old, new))
END
python /tmp/fix.py
