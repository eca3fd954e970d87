"""Shardings chosen by cost: a recorded program, the rules, and a mesh give layouts for its inputs. Pure."""
