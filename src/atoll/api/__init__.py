"""
The entry points of the control plane: REST, WebSockets and internal callbacks. A route validates
the request, calls one service method and writes the response.
"""
