"""What builds and checks a release."""
