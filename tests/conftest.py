"""Every test runs serially and under mpiexec with 2, 3 and 4 ranks; the plugin keeps the ranks in step."""

pytest_plugins = ["hpcpar.testing.plugin"]
