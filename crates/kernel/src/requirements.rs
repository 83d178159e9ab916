//! Kernel options that Jiffy and Docker in a guest need.

use Need::{Docker, Needed, Recommended};
use serde::Serialize;

/// Importance of a requirement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Need {
    /// Guests do not boot without it.
    Needed,
    /// A feature that users expect does not work without it.
    Recommended,
    /// Docker in the guest does not work fully without it.
    Docker,
}

/// A requirement of a kernel.
pub struct Requirement {
    /// Options without `CONFIG_`; one of them is enough.
    pub options: &'static [&'static str],
    pub need: Need,
    /// Its purpose, to follow the word "for".
    pub why: &'static str,
}

const fn one(options: &'static [&'static str], need: Need, why: &'static str) -> Requirement {
    Requirement { options, need, why }
}

pub const REQUIREMENTS: &[Requirement] = &[
    // Needed to boot and to start jiffy-init.
    one(&["64BIT"], Needed, "64-bit guests, the only supported ones"),
    one(&["VIRTIO_MMIO"], Needed, "every virtio device"),
    one(
        &["VIRTIO_MMIO_CMDLINE_DEVICES"],
        Needed,
        "finding virtio devices named on the command line",
    ),
    one(
        &["BLK_DEV_INITRD"],
        Needed,
        "jiffy-init, which is in an initramfs",
    ),
    one(&["BINFMT_ELF"], Needed, "running programs"),
    one(&["PRINTK"], Recommended, "the kernel's log"),
    one(&["TTY"], Needed, "terminals"),
    one(&["PROC_FS"], Needed, "/proc"),
    one(&["SYSFS"], Needed, "/sys"),
    one(&["DEVTMPFS"], Needed, "/dev"),
    one(&["TMPFS"], Needed, "/tmp, /run and /dev/shm"),
    one(&["UNIX98_PTYS"], Needed, "`-t`: pseudo-terminals"),
    one(
        &["FW_CFG_SYSFS"],
        Needed,
        "the guest's configuration, which is in fw_cfg",
    ),
    one(
        &["FW_CFG_SYSFS_CMDLINE"],
        Needed,
        "finding fw_cfg named on the command line",
    ),
    one(&["VSOCKETS"], Needed, "the agent's connection to the host"),
    one(
        &["VIRTIO_VSOCKETS"],
        Needed,
        "the agent's connection to the host",
    ),
    one(&["NET"], Needed, "sockets"),
    one(&["UNIX"], Needed, "Unix sockets"),
    one(&["BLOCK"], Needed, "disks"),
    one(&["VIRTIO_BLK"], Needed, "disks and images"),
    one(&["EROFS_FS"], Needed, "images, which are EROFS"),
    one(
        &["OVERLAY_FS"],
        Needed,
        "a writable root over a read-only image",
    ),
    one(&["EPOLL"], Needed, "jiffy-init's event loop"),
    one(&["SIGNALFD"], Needed, "jiffy-init's event loop"),
    one(&["TIMERFD"], Needed, "jiffy-init's event loop"),
    one(&["FUTEX"], Needed, "threads"),
    one(&["MULTIUSER"], Needed, "`-u`: users other than root"),
    one(&["POSIX_TIMERS"], Needed, "timers"),
    // Features that are limited without the option.
    one(
        &["PVH"],
        Recommended,
        "booting the uncompressed kernel directly; without it only a bzImage boots",
    ),
    one(&["SMP"], Recommended, "more than one vCPU"),
    one(
        &["X86_MPPARSE", "ACPI"],
        Recommended,
        "finding vCPUs and the interrupt controller in the MP table",
    ),
    one(
        &["KVM_GUEST"],
        Recommended,
        "the KVM clock; without it the clock is calibrated at every boot",
    ),
    one(&["PARAVIRT"], Recommended, "the KVM clock and stolen time"),
    one(
        &["HIGH_RES_TIMERS"],
        Recommended,
        "sleeping for less than a tick",
    ),
    one(
        &["NO_HZ_IDLE", "NO_HZ_FULL"],
        Recommended,
        "idle guests that use no CPU time of the host",
    ),
    one(
        &["HW_RANDOM_VIRTIO"],
        Recommended,
        "randomness from the host, and reseeding after a restore",
    ),
    one(
        &["VIRTIO_BALLOON"],
        Recommended,
        "giving memory back to the host",
    ),
    one(
        &["PAGE_REPORTING"],
        Recommended,
        "keeping free pages out of snapshots",
    ),
    one(&["VIRTIO_NET"], Recommended, "network interfaces"),
    one(&["INET"], Recommended, "IPv4"),
    one(&["IPV6"], Recommended, "IPv6"),
    one(&["TUN"], Recommended, "VPNs inside the guest"),
    one(&["PACKET"], Recommended, "DHCP clients and tcpdump"),
    one(&["SERIAL_8250_CONSOLE"], Recommended, "`--console`"),
    one(
        &["X86_IOPL_IOPERM", "DEVPORT"],
        Recommended,
        "the guest's own marks on the timeline",
    ),
    one(&["EXT4_FS"], Recommended, "writable disks"),
    one(&["FUSE_FS"], Recommended, "file systems in user space"),
    one(&["SHMEM"], Recommended, "shared memory"),
    one(&["SWAP"], Recommended, "swap"),
    one(&["CGROUPS"], Recommended, "limits on services and commands"),
    one(&["MEMCG"], Recommended, "limits on memory"),
    one(&["CGROUP_PIDS"], Recommended, "limits on processes"),
    one(&["CGROUP_SCHED"], Recommended, "shares of the processor"),
    one(&["NAMESPACES"], Recommended, "containers"),
    one(&["PID_NS"], Recommended, "containers"),
    one(&["USER_NS"], Recommended, "containers without root"),
    one(
        &["NET_NS"],
        Recommended,
        "containers with their own network",
    ),
    one(&["IPC_NS"], Recommended, "containers"),
    one(
        &["UTS_NS"],
        Recommended,
        "containers with their own host name",
    ),
    one(
        &["SECCOMP_FILTER"],
        Recommended,
        "sandboxes (browsers, containers, systemd)",
    ),
    one(&["INOTIFY_USER"], Recommended, "programs that watch files"),
    one(&["IO_URING"], Recommended, "programs that use io_uring"),
    one(
        &["USERFAULTFD"],
        Recommended,
        "post-copy memory inside the guest",
    ),
    one(&["AIO"], Recommended, "databases"),
    one(&["SYSVIPC"], Recommended, "databases"),
    one(&["POSIX_MQUEUE"], Recommended, "message queues"),
    one(&["MEMFD_CREATE"], Recommended, "anonymous files"),
    one(&["COREDUMP"], Recommended, "core dumps"),
    one(
        &["TRANSPARENT_HUGEPAGE"],
        Recommended,
        "cheap address translation under nested paging",
    ),
    // For Docker; moby's contrib/check-config.sh has the same options.
    one(
        &["CGROUP_DEVICE", "CGROUP_BPF"],
        Docker,
        "device rules of containers",
    ),
    one(&["CGROUP_FREEZER"], Docker, "`docker pause`"),
    one(&["CGROUP_CPUACCT"], Docker, "`docker stats`"),
    one(&["CPUSETS"], Docker, "`--cpuset-cpus`"),
    one(&["FAIR_GROUP_SCHED"], Docker, "`--cpu-shares`"),
    one(&["CFS_BANDWIDTH"], Docker, "`--cpus`"),
    one(&["BLK_CGROUP"], Docker, "`--blkio-weight`"),
    one(&["BLK_DEV_THROTTLING"], Docker, "`--device-read-bps`"),
    one(&["CGROUP_HUGETLB"], Docker, "limits on huge pages"),
    one(&["CGROUP_PERF"], Docker, "performance events of containers"),
    one(&["NET_CLS_CGROUP"], Docker, "traffic classes of containers"),
    one(
        &["CGROUP_NET_PRIO"],
        Docker,
        "traffic priorities of containers",
    ),
    one(&["BPF_SYSCALL"], Docker, "device rules under cgroup v2"),
    one(&["CGROUP_BPF"], Docker, "device rules under cgroup v2"),
    one(&["KEYS"], Docker, "one key ring per container"),
    one(&["BRIDGE"], Docker, "docker0"),
    one(
        &["BRIDGE_NETFILTER"],
        Docker,
        "rules between containers of one bridge",
    ),
    one(&["BRIDGE_VLAN_FILTERING"], Docker, "overlay networks"),
    one(&["VETH"], Docker, "the network of every container"),
    one(&["NETFILTER_ADVANCED"], Docker, "published ports"),
    one(&["NF_CONNTRACK"], Docker, "published ports"),
    one(&["NF_NAT"], Docker, "published ports"),
    one(&["IP_NF_FILTER"], Docker, "iptables (legacy)"),
    one(&["IP_NF_NAT"], Docker, "iptables (legacy)"),
    one(&["IP_NF_MANGLE"], Docker, "iptables (legacy)"),
    one(&["IP_NF_TARGET_MASQUERADE"], Docker, "iptables (legacy)"),
    one(&["IP6_NF_FILTER"], Docker, "ip6tables (legacy)"),
    one(&["IP6_NF_NAT"], Docker, "ip6tables (legacy)"),
    one(&["NETFILTER_XT_MATCH_ADDRTYPE"], Docker, "published ports"),
    one(&["NETFILTER_XT_MATCH_CONNTRACK"], Docker, "published ports"),
    one(&["NETFILTER_XT_MATCH_IPVS"], Docker, "swarm services"),
    one(&["NETFILTER_XT_MARK"], Docker, "swarm services"),
    one(&["NF_TABLES"], Docker, "nftables and iptables-nft"),
    one(&["NF_TABLES_INET"], Docker, "nftables"),
    one(&["NFT_COMPAT"], Docker, "iptables-nft"),
    one(&["NFT_CT"], Docker, "nftables"),
    one(&["NFT_MASQ"], Docker, "nftables"),
    one(&["NFT_NAT"], Docker, "nftables"),
    one(&["NFT_FIB_IPV4"], Docker, "nftables"),
    one(&["NFT_REDIR"], Docker, "nftables"),
    one(&["NFT_REJECT"], Docker, "nftables"),
    one(&["IP_VS"], Docker, "swarm services"),
    one(&["IP_VS_NFCT"], Docker, "swarm services"),
    one(&["IP_VS_PROTO_TCP"], Docker, "swarm services"),
    one(&["IP_VS_PROTO_UDP"], Docker, "swarm services"),
    one(&["IP_VS_RR"], Docker, "swarm services"),
    one(&["VXLAN"], Docker, "overlay networks"),
    one(&["INET_ESP"], Docker, "encrypted overlay networks"),
    one(&["XFRM_USER"], Docker, "encrypted overlay networks"),
    one(&["CRYPTO_GCM"], Docker, "encrypted overlay networks"),
    one(&["IPVLAN"], Docker, "ipvlan networks"),
    one(&["MACVLAN"], Docker, "macvlan networks"),
    one(&["DUMMY"], Docker, "dummy interfaces"),
    one(&["VLAN_8021Q"], Docker, "VLANs"),
    one(&["NET_SCHED"], Docker, "limits on traffic"),
    one(
        &["EXT4_FS_POSIX_ACL"],
        Docker,
        "image layers with access lists",
    ),
    one(
        &["EXT4_FS_SECURITY"],
        Docker,
        "image layers with capabilities",
    ),
    one(
        &["SECURITY_APPARMOR", "SECURITY_SELINUX"],
        Docker,
        "the default profile of containers",
    ),
    one(&["BINFMT_MISC"], Docker, "images of other architectures"),
    one(&["IA32_EMULATION"], Docker, "32-bit images"),
    one(&["CHECKPOINT_RESTORE"], Docker, "`docker checkpoint`"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_requirement_names_options_and_a_reason() {
        for requirement in REQUIREMENTS {
            assert!(!requirement.options.is_empty());
            assert!(!requirement.why.is_empty());
            for option in requirement.options {
                assert!(!option.starts_with("CONFIG_"), "{option}");
            }
        }
    }
}
