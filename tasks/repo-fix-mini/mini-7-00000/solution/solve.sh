#!/bin/bash
set -eu
cat > /tmp/fix.py <<'END'
import pathlib

path = pathlib.Path("/app") / 'sphere/member/cabin.py'
text = path.read_text()
old, new = 'return sorted(blade)', 'return min(blade)'
assert text.count(old) == 1
path.write_text(text.replace(old, new))
END
python /tmp/fix.py
