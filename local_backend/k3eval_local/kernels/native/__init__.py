"""The native CPU step: C built at first use; ``build`` says why when it cannot be had."""
