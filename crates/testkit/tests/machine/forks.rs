//! Forks: clones of a running VM.

use crate::support::{Jiffy, jiffy};

/// Pages of the file that the memory tests write: 16 MiB.
const PAGES: usize = 4096;

/// The expected memory of a VM: a tag for each page.
#[derive(Clone, PartialEq, Debug)]
struct Pages(Vec<usize>);

impl Pages {
    fn new(jiffy: &Jiffy, vm: &str) -> Pages {
        jiffy.ok(&[
            "exec",
            vm,
            "sh",
            "-c",
            "head -c 16777216 /dev/zero > /tmp/pages && witness paint /tmp/pages 1 0 1",
        ]);
        Pages(vec![1; PAGES])
    }

    /// Writes every `step`th page from `first` on in a VM, then checks all its pages.
    fn paint(&mut self, jiffy: &Jiffy, vm: &str, tag: usize, first: usize, step: usize) {
        for page in (first..PAGES).step_by(step) {
            self.0[page] = tag;
        }
        let script =
            format!("witness paint /tmp/pages {tag} {first} {step} && witness look /tmp/pages");
        let seen = jiffy.ok(&["exec", vm, "sh", "-c", &script]);
        assert!(
            seen == self.text(),
            "{vm} after tag {tag}: {}",
            self.wrong(&seen)
        );
    }

    fn look(&self, jiffy: &Jiffy, vm: &str) {
        let seen = jiffy.ok(&["exec", vm, "witness", "look", "/tmp/pages"]);
        assert!(seen == self.text(), "{vm}: {}", self.wrong(&seen));
    }

    /// The pages in the format of the witness's output.
    fn text(&self) -> String {
        let runs = self.0.chunk_by(|a, b| a == b);
        let runs: Vec<String> = runs
            .map(|run| format!("{}*{}", run[0], run.len()))
            .collect();
        runs.join(" ")
    }

    fn wrong(&self, seen: &str) -> String {
        let expected = self.text();
        let begin = |text: &str| text.chars().take(200).collect::<String>();
        format!("expected {} … and saw {} …", begin(&expected), begin(seen))
    }
}

#[test]
fn three_forked_children_have_new_identities_and_run_on() {
    let jiffy = jiffy();
    jiffy.witness("parent", &[], "count /tmp/n");
    jiffy.wait_for_count_above("parent", 2);
    // The lines that init writes, and more than a page of others, as a list of blocked names has.
    let block = "(printf '127.0.0.1\\tlocalhost\\n::1\\tlocalhost ip6-localhost ip6-loopback\\n'; \
                 printf '127.0.1.1\\tparent\\n'; \
                 for n in $(seq 300); do echo \"0.0.0.0 blocked-$n.example\"; done) > /etc/hosts";
    jiffy.ok(&["exec", "parent", "sh", "-c", block]);
    let children = jiffy.ok(&["fork", "parent", "-n", "3", "--name", "child"]);
    assert_eq!(children, "child-1\nchild-2\nchild-3");
    let counted = jiffy.counted("parent");
    let all = ["parent", "child-1", "child-2", "child-3"];
    // The number drawn last may be one that all VMs drew before the fork.
    for vm in all {
        jiffy.wait_for_count_above(vm, counted + 1);
    }
    let identities: Vec<Vec<String>> = all
        .iter()
        .map(|vm| {
            let script = "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id; \
                          witness cid; tail -n 1 /tmp/n.random";
            let text = jiffy.ok(&["exec", vm, "sh", "-c", script]);
            text.lines().map(String::from).collect()
        })
        .collect();
    for (n, one) in identities.iter().enumerate() {
        assert_eq!(one[0], all[n], "the host name");
        for other in &identities[n + 1..] {
            let shared: Vec<_> = one.iter().zip(other).filter(|(a, b)| a == b).collect();
            assert!(shared.is_empty(), "{one:?} and {other:?}");
        }
    }
    for vm in all {
        let hosts = jiffy.ok(&["exec", vm, "cat", "/etc/hosts"]);
        assert_eq!(hosts.matches("blocked-").count(), 300, "{vm}: {hosts}");
        assert!(hosts.contains(&format!("\t{vm}\n")), "{vm}: {hosts}");
    }
    assert_eq!(jiffy.inspect("child-2")["origin"]["forked_from"], "parent");
    // Each has its own command: when one ends, the others run on.
    jiffy.kill_witnesses("child-1");
    jiffy.ok(&["wait", "child-1"]);
    jiffy.wait_for_count_above("child-2", counted + 5);
    let sentence = jiffy.refuses(125, &["fork", "nobody"]);
    assert!(sentence.contains("nobody"), "{sentence}");
    let sentence = jiffy.refuses(125, &["fork", "parent", "--name", "child-2"]);
    assert!(sentence.contains("child-2"), "{sentence}");
    let sentence = jiffy.refuses(125, &["fork", "child-1"]);
    assert!(sentence.contains("child-1"), "{sentence}");
}

#[test]
fn every_page_is_correct_in_parent_and_children() {
    let jiffy = jiffy();
    jiffy.witness("parent", &[], "count /tmp/n");
    let mut parent = Pages::new(&jiffy, "parent");
    let mut children: Vec<(String, Pages)> = Vec::new();
    // A parent that forks several times and writes in between.
    for round in 0..3 {
        parent.paint(&jiffy, "parent", 10 + round, round, 5 + round);
        let child = format!("child{round}");
        jiffy.ok(&["fork", "parent", "--name", &child]);
        children.push((child, parent.clone()));
    }
    parent.paint(&jiffy, "parent", 20, 0, 3);
    for (n, (child, pages)) in children.iter_mut().enumerate() {
        pages.paint(&jiffy, child, 30 + n, n, 4);
    }
    // What one VM writes is invisible to the others, also after its parent has ended.
    parent.look(&jiffy, "parent");
    jiffy.ok(&["rm", "-f", "parent"]);
    for (child, pages) in &children {
        pages.look(&jiffy, child);
    }
}

#[test]
fn a_chain_of_six_forks_survives_removal_of_the_parents() {
    let jiffy = jiffy();
    let before = jiffy.settled_traces();
    jiffy.witness("link0", &[], "count /tmp/n");
    let mut pages = Pages::new(&jiffy, "link0");
    for link in 1..=6 {
        let (last, next) = (format!("link{}", link - 1), format!("link{link}"));
        pages.paint(&jiffy, &last, 100 + link, link, 7);
        jiffy.ok(&["fork", &last, "--name", &next]);
        // Later writes of the parent are invisible to the child.
        if link % 2 == 0 {
            let script = "witness paint /tmp/pages 999 0 1";
            jiffy.ok(&["exec", &last, "sh", "-c", script]);
        }
        jiffy.ok(&["rm", "-f", &last]);
    }
    pages.look(&jiffy, "link6");
    pages.paint(&jiffy, "link6", 200, 1, 2);
    let counted = jiffy.counted("link6");
    jiffy.wait_for_count_above("link6", counted);
    jiffy.ok(&["rm", "-f", "link6"]);
    jiffy.assert_nothing_left(&before, "after the chain");
}
