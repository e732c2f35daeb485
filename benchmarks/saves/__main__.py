from fp8_suite.benchmarks.saves.main import main

if __name__ == "__main__":
    code = main()
    from fp8_suite.training.outcome import exit_process  # imports torch

    exit_process(code)
