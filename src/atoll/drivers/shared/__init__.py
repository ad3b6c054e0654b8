"""
What several drivers need: control groups, file system images, workspaces, volumes, package
environments and the executor as a file. Nothing here imports a driver.
"""
