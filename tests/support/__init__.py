"""What tests are made with: workers in processes of their own, doubles, and checks for leftovers."""
