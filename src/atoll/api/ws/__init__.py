"""What is spoken over WebSockets."""
