#!/bin/bash
# Runs `check`, and passes where there is no promtool, saying so.
status=0
"$@" || status=$?
if [[ $status == 3 ]]; then exit 0; fi
exit "$status"
