import sys

from fp8_suite.benchmarks.compare.main import main

sys.exit(main())
