#!/usr/bin/env bash
# The smallest part of the safety net: a plan of every framework, and two small searches. About 10 seconds.
exec "${PYTHON:-python}" -m tests.golden --smoke -j 1
