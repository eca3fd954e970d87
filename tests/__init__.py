"""The tests of farcall; they mirror the packages that they test."""
