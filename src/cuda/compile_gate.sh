#!/bin/sh
# compile_gate.sh COMMAND...: runs a CUDA compilation and fails it when the assembler reports a spill, local memory, or one
# of its notes C7508 to C7520 (register limits ignored, asynchronous matrix products serialised).
report=$("$@" 2>&1)
status=$?
[ -z "$report" ] || printf '%s\n' "$report"
[ "$status" -eq 0 ] || exit "$status"
faults=$(printf '%s\n' "$report" | grep -E '(^|[^0-9])[1-9][0-9]* bytes (stack frame|spill stores|spill loads)|C75(0[89]|1[0-9]|20)')
[ -z "$faults" ] && exit 0
printf 'compile_gate: spills, local memory or serialised instructions:\n%s\n' "$faults" >&2
exit 1
