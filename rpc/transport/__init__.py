"""How frames get from process to process: one file per transport, and a registry of them."""
