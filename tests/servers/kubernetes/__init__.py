"""
A real Kubernetes cluster for tests: etcd, the control plane and nodes with kubelet and containerd.

All of it is built from Go modules and Debian packages. It runs in a network namespace that the
tests own (`namespace`), and on root's behalf. `cluster.Cluster` is the public face.
"""
