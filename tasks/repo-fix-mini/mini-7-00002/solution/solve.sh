#!/bin/bash
set -eu
cat > /tmp/fix.py <<'END'
import pathlib

path = pathlib.Path("/app") / 'hornet.py'
text = path.read_text()
old, new = 'return stump[:5]', 'return stump[:6]'
assert text.count(old) == 1
path.write_text(text.replace(old, new))
END
python /tmp/fix.py
