//! Copies of files into and out of guests.

use crate::support::jiffy;

#[test]
fn a_file_is_copied_in_and_out_unchanged() {
    let jiffy = jiffy();
    jiffy.ok(&["run", "-d", "--name", "box"]);
    jiffy.sh("head -c 3000000 /dev/urandom > /tmp/original; chmod 640 /tmp/original");
    jiffy.ok(&["cp", "/tmp/original", "box:/opt/copy"]);
    jiffy.ok(&["cp", "box:/opt/copy", "/tmp/back"]);
    jiffy.sh("cmp /tmp/original /tmp/back");
    assert_eq!(
        jiffy.ok(&["exec", "box", "stat", "-c", "%a", "/opt/copy"]),
        "640"
    );
    jiffy.sh("rm -f /tmp/original /tmp/back");
}

#[test]
fn a_tree_keeps_its_modes_links_and_empty_folders() {
    let jiffy = jiffy();
    jiffy.ok(&["run", "-d", "--name", "box"]);
    jiffy.sh(
        "rm -rf /tmp/tree /tmp/again; mkdir -p /tmp/tree/a/b /tmp/tree/empty; \
         echo one > /tmp/tree/a/one; chmod 750 /tmp/tree/a/one; chmod 700 /tmp/tree/a/b; \
         ln -s ../one /tmp/tree/a/b/link; ln -s /nowhere /tmp/tree/dangling; \
         printf 'odd' > '/tmp/tree/a name with spaces'",
    );
    jiffy.ok(&["cp", "/tmp/tree", "box:/srv"]);
    jiffy.ok(&["cp", "box:/srv", "/tmp/again"]);
    let list = |folder: &str| {
        jiffy.sh(&format!(
            "cd {folder} && find . -exec stat -c '%n %A %N' {{}} + | sort; find . -type f -exec md5sum {{}} + | sort"
        ))
    };
    assert_eq!(list("/tmp/tree"), list("/tmp/again"));
    jiffy.sh("rm -rf /tmp/tree /tmp/again");
}

#[test]
fn a_missing_path_is_named() {
    let jiffy = jiffy();
    jiffy.ok(&["run", "-d", "--name", "box"]);
    let sentence = jiffy.refuses(125, &["cp", "box:/no/such/file", "/tmp/x"]);
    assert!(sentence.contains("/no/such/file"), "{sentence}");
    let sentence = jiffy.refuses(125, &["cp", "/no/such/file", "box:/tmp"]);
    assert!(sentence.contains("/no/such/file"), "{sentence}");
}
