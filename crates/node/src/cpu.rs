//! What this host's processors can do.

use std::collections::BTreeSet;
use std::sync::OnceLock;

/// Features that every processor of this host has, by the names Linux gives
/// them in /proc/cpuinfo. Read once.
pub fn features() -> &'static BTreeSet<String> {
    static FEATURES: OnceLock<BTreeSet<String>> = OnceLock::new();
    FEATURES.get_or_init(|| {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        common_flags(&text)
    })
}

/// Those of `wanted` that this host does not have.
pub fn missing(wanted: &[String]) -> Vec<String> {
    let have = features();
    let lacks = |name: &&String| !have.contains(*name);
    wanted.iter().filter(lacks).cloned().collect()
}

fn common_flags(text: &str) -> BTreeSet<String> {
    let mut lists = text
        .lines()
        .filter_map(|line| line.strip_prefix("flags"))
        .filter_map(|rest| rest.trim_start().strip_prefix(':'))
        .map(|flags| {
            let flags = flags.split_whitespace().map(str::to_owned);
            flags.collect::<BTreeSet<_>>()
        });
    let first = lists.next().unwrap_or_default();
    lists.fold(first, |all, one| &all & &one)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_all_processors_have_counts() {
        let text = "processor\t: 0\nflags\t\t: fpu sse avx\nvmx flags\t: x\n\nprocessor\t: 1\nflags\t\t: fpu sse avx512f\n";
        let common: Vec<_> = common_flags(text).into_iter().collect();
        assert_eq!(common, ["fpu", "sse"]);
        assert!(common_flags("").is_empty());
    }
}
