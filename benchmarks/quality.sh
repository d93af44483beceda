#!/usr/bin/env bash
# All parts of quality.py on a machine with two GPUs, in about 14 minutes:
#
#     PYTHONPATH=FOLDER_WITH_SPECFORGE benchmarks/quality.sh --responses FILE --prompts DIR --root DIR [--out FILE]
#
# The peer and the recipe that is held against its clock train at the same time, a GPU each, so that both have the same host
# and nothing else runs beside them. Then the parts whose seconds are not compared, several on a GPU. Logs: ROOT/logs.
set -u
here=$(cd "$(dirname "$0")" && pwd)
options=("$@") root=""
while [ $# -gt 0 ]; do
    if [ "$1" = --root ]; then root=$2; fi
    shift
done
if [ -z "$root" ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
mkdir -p "$root/logs"

part() { # part GPU NAME
    CUDA_VISIBLE_DEVICES=$1 python3 "$here/quality.py" "${options[@]}" --last-hidden "$2" > "$root/logs/$2.log" 2>&1
    local status=$?
    grep '^===' "$root/logs/$2.log" | tail -n 1
    [ $status -eq 0 ] || tail -n 3 "$root/logs/$2.log"
}

part 0 prepare
part 0 specforge & part 1 time-kl & wait
for name in codec-int8 codec-int6 codec-int4; do part 0 $name & done
for name in codec-bf16 codec-lossless codec-lossless-fp8; do part 1 $name & done
wait
part 0 equal
