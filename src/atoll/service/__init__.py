"""What Atoll does, one module a noun, one method an API verb."""
