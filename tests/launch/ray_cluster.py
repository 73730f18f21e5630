"""A Ray cluster of processes of this machine: a head without CPUs and two nodes. Prints the address
that takes jobs; `kill` on standard input ends the second node, `add` starts another one."""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster  # type: ignore[import-not-found, unused-ignore]

CPUS = 2


def main() -> None:
    port = int(sys.argv[1])
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": port}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=CPUS) for _ in range(2)]
    print(f"http://127.0.0.1:{port}", flush=True)
    for line in sys.stdin:
        if line.strip() == "kill":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        else:
            nodes.append(cluster.add_node(num_cpus=CPUS))
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
