//! Host name, the files in /etc that name hosts, and kernel parameters.

use crate::files;
use crate::program::prepare::reason;
use crate::report::Report;
use alloc::{format, string::String, vec::Vec};
use core::fmt::Write;
use jiffy_wire::guest::{GuestConfig, Root};
use rustix::io::Errno;
use rustix::rand::GetRandomFlags;

/// More than any that init writes.
const LARGEST_HOSTS: usize = 4096;

const HOSTS: &str = "/etc/hosts";
const MACHINE_ID: &str = "/etc/machine-id";

/// Applies what the configuration gives.
pub fn set(config: &GuestConfig, report: &mut Report) {
    apply(config, &GuestConfig::default(), report);
    if !files::exists(HOSTS) {
        report.step("hosts", |_| write_hosts(config));
    }
    // In memory: nothing of it outlives this boot. A distribution's init has
    // rules of its own.
    if let (Root::Overlay { upper: None, .. }, None) = (&config.root, &config.handover) {
        let mut random = [0; 16];
        let drawn = rustix::rand::getrandom(&mut random[..], GetRandomFlags::INSECURE);
        if drawn == Ok(random.len()) {
            machine_id(&hexadecimal(&random), report);
        }
    }
}

/// Applies what differs in a new configuration.
pub fn renew(old: &GuestConfig, new: &GuestConfig, report: &mut Report) {
    apply(new, old, report);
    // Ours, from the boot, and nobody has changed it since.
    if new.hostname != old.hostname
        && files::read(HOSTS, LARGEST_HOSTS)
            .is_ok_and(|content| content == hosts(old.hostname.as_deref()).as_bytes())
    {
        report.step("hosts", |_| write_hosts(new));
    }
}

/// Makes this (hexadecimal, with or without dashes) the machine's id, if the
/// image has a file for it. Without one, programs generate their own.
pub fn machine_id(id: &str, report: &mut Report) {
    if !files::exists(MACHINE_ID) {
        return;
    }
    report.step("machine id", |_| {
        let mut content = id.replace('-', "");
        content.push('\n');
        match files::create(MACHINE_ID, content.as_bytes(), 0o444) {
            // A root that cannot be written: covered.
            Err(Errno::ROFS) => cover_machine_id(&content),
            other => other,
        }
        .map_err(|error| format!("{MACHINE_ID} cannot be written: {}", reason(error)))
    });
}

fn cover_machine_id(content: &str) -> Result<(), Errno> {
    const COVER: &str = "/run/machine-id";
    files::create(COVER, content.as_bytes(), 0o444)?;
    let _ = rustix::mount::unmount(MACHINE_ID, rustix::mount::UnmountFlags::DETACH);
    rustix::mount::mount_bind(COVER, MACHINE_ID)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn apply(config: &GuestConfig, old: &GuestConfig, report: &mut Report) {
    if let Some(hostname) = &config.hostname {
        report.step("hostname", |_| {
            rustix::system::sethostname(hostname.as_bytes())
                .map_err(|error| format!("the name {hostname:?} was refused: {}", reason(error)))
        });
    }
    if !config.name_servers.is_empty() && config.name_servers != old.name_servers {
        report.step("name servers", |_| {
            let content = resolv_conf(&config.name_servers)?;
            replace_file("/etc/resolv.conf", content.as_bytes())
        });
    }
    let changed = || {
        let sysctls = config.sysctls.iter();
        sysctls.filter(|(key, value)| old.sysctls.get(*key) != Some(*value))
    };
    if changed().next().is_some() {
        report.step("sysctls", |_| apply_sysctls(changed()));
    }
}

fn write_hosts(config: &GuestConfig) -> Result<(), String> {
    replace_file(HOSTS, hosts(config.hostname.as_deref()).as_bytes())
}

/// Writes a file in /etc, in place of a dangling link if one is there.
fn replace_file(path: &str, content: &[u8]) -> Result<(), String> {
    let written = match files::create(path, content, 0o644) {
        Err(Errno::NOENT) => {
            // No such folder, or a link to where nothing is.
            files::make_folder(c"/etc", 0o755)
                .and_then(|()| match rustix::fs::unlink(path) {
                    Err(Errno::NOENT) => Ok(()),
                    other => other,
                })
                .and_then(|()| files::create(path, content, 0o644))
        }
        other => other,
    };
    written.map_err(|error| format!("{path} cannot be written: {}", reason(error)))
}

fn resolv_conf(servers: &[String]) -> Result<String, String> {
    let mut content = String::new();
    for server in servers {
        if server.parse::<core::net::IpAddr>().is_err() {
            return Err(format!("the name server {server:?} is not an IP address"));
        }
        let _ = writeln!(content, "nameserver {server}");
    }
    Ok(content)
}

fn hosts(hostname: Option<&str>) -> String {
    let mut content =
        String::from("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    if let Some(name) = hostname {
        let _ = writeln!(content, "127.0.1.1\t{name}");
    }
    content
}

fn apply_sysctls<'a>(
    sysctls: impl Iterator<Item = (&'a String, &'a String)>,
) -> Result<(), String> {
    let failures: Vec<String> = sysctls
        .filter_map(|(key, value)| {
            let Some(path) = sysctl_path(key) else {
                return Some(format!("{key:?} is not the name of a kernel parameter"));
            };
            files::write(path.as_str(), value.as_bytes())
                .err()
                .map(|error| format!("{key} = {value}: {}", reason(error)))
        })
        .collect();
    if failures.is_empty() {
        Ok(())
    } else {
        Err(failures.join("; "))
    }
}

/// `net.ipv4.ip_forward` → its file. As in sysctl(8), a name whose first
/// separator is a slash uses slashes, so that its parts may hold dots.
fn sysctl_path(key: &str) -> Option<String> {
    let slashes = key
        .find(['.', '/'])
        .is_some_and(|at| key.as_bytes()[at] == b'/');
    let separator = if slashes { '/' } else { '.' };
    let mut path = String::from("/proc/sys");
    for part in key.split(separator) {
        // With dots as separators a slash in a part stands for a dot.
        let part = if slashes {
            String::from(part)
        } else {
            part.replace('/', ".")
        };
        if part.is_empty() || part == "." || part == ".." || part.contains('\0') {
            return None;
        }
        path.push('/');
        path.push_str(&part);
    }
    Some(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_become_paths_as_in_sysctl() {
        let path = |key| sysctl_path(key);
        assert_eq!(path("vm.swappiness").unwrap(), "/proc/sys/vm/swappiness");
        assert_eq!(
            path("net/ipv4/conf/eth0.1/forwarding").unwrap(),
            "/proc/sys/net/ipv4/conf/eth0.1/forwarding"
        );
        assert_eq!(
            path("net.ipv4.conf.eth0/1.forwarding").unwrap(),
            "/proc/sys/net/ipv4/conf/eth0.1/forwarding"
        );
        for bad in [
            "",
            ".",
            "..",
            "vm..swappiness",
            "net/../../x",
            "/etc/passwd",
            "vm.",
        ] {
            assert_eq!(path(bad), None, "{bad}");
        }
    }

    #[test]
    fn name_servers_are_addresses() {
        let both = [String::from("10.0.0.1"), String::from("fd00::1")];
        assert_eq!(
            resolv_conf(&both).unwrap(),
            "nameserver 10.0.0.1\nnameserver fd00::1\n"
        );
        assert!(resolv_conf(&[String::from("10.0.0.1\nsearch evil")]).is_err());
    }

    #[test]
    fn hosts_name_the_guest() {
        assert!(hosts(Some("box")).ends_with("127.0.1.1\tbox\n"));
        assert!(!hosts(None).contains("127.0.1.1"));
    }

    proptest! {
        #[test]
        fn no_name_leaves_the_folder(key in "[a-z./]{0,30}") {
            if let Some(path) = sysctl_path(&key) {
                prop_assert!(path.starts_with("/proc/sys/"));
                prop_assert!(!path.split('/').any(|part| part == ".."));
            }
        }
    }
}
