//! Fixtures and the harness that runs tests in the machine.
