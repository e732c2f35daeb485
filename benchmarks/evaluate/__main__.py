import sys

from fp8_suite.benchmarks.evaluate.main import main

sys.exit(main())
