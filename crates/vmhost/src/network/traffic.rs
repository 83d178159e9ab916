//! Traffic of VMs' links, from the kernel's statistics.

use jiffy_net::VmId;
use std::collections::HashMap;
use std::fs;

/// Bytes that each VM's link in this network namespace has carried in both directions, by VM id.
pub fn traffic() -> HashMap<String, u64> {
    let text = fs::read_to_string("/proc/self/net/dev").unwrap_or_default();
    parse(&text)
}

/// /proc/net/dev of proc_pid_net(5): a line for each link, `NAME: RECEIVED… SENT…`, eight numbers
/// each, of which the first is bytes.
fn parse(text: &str) -> HashMap<String, u64> {
    let links = text.lines().filter_map(|line| {
        let (name, numbers) = line.split_once(':')?;
        let vm = VmId::of_link(name.trim())?;
        let mut bytes = numbers.split_ascii_whitespace().step_by(8);
        let mut next = || bytes.next()?.parse::<u64>().ok();
        Some((vm.to_string(), next()?.saturating_add(next()?)))
    });
    links.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traffic_of_vm_links_is_parsed() {
        let text = "Inter-|   Receive          |  Transmit\n face |bytes packets\n\
            lo: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n\
            jf-0123456789ab: 100 2 3 4 5 6 7 8 50 10 11 12 13 14 15 16\n\
            jf-host: 7 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n jf-00112233aabb: 5\n";
        let found = parse(text);
        assert_eq!(found, HashMap::from([("0123456789ab".to_owned(), 150)]));
    }
}
