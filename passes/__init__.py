"""The passes that come with fxopt, one file each. fxopt finds them through the entry point group `fxopt.passes`."""
