# Workers on every client that has sbxd: each allocation uses the socket of its own node.
job "agent-worker" {
  type = "system"

  constraint {
    attribute = "${meta.sbxd_ready}"
    value     = "true"
  }

  group "worker" {
    # In the client's configuration: host_volume "sbxd" { path = "/run/sbxd" read_only = true }
    volume "sbxd" {
      type      = "host"
      source    = "sbxd"
      read_only = true
    }

    task "worker" {
      driver = "docker"
      # A uid of service.worker_uids, with the gid of group sbxd-workers.
      user = "1000:990"

      config {
        image           = "registry.example.org/agent-worker@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
        cap_drop        = ["all"]
        readonly_rootfs = true
        privileged      = false
        security_opt    = ["no-new-privileges"]
      }

      volume_mount {
        volume      = "sbxd"
        destination = "/run/sbxd"
        read_only   = true
      }

      env {
        SBXD_SOCKET = "/run/sbxd/worker.sock"
      }

      resources {
        cpu    = 100
        memory = 512
      }
    }
  }
}
