import sys

from fp8_suite.benchmarks.report.main import main

sys.exit(main())
