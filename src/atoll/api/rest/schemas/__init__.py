"""Request and response bodies, one module per noun; `base` explains how they are declared."""
