#!/bin/bash
# Runs a program as a test: sh_test wants a script, which benchmarks and examples are not.
exec "$@"
