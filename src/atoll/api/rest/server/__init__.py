"""The HTTP server below the application: listening sockets, connections and their time-outs."""
