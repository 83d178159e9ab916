use super::*;
use jiffy_wire::agent::CopyKind;

fn entry(path: &str) -> CopyEntry {
    CopyEntry {
        path: path.into(),
        kind: CopyKind::Folder,
        mode: 0o755,
        uid: 0,
        gid: 0,
        mtime: 0,
    }
}

#[test]
fn paths_stay_below_the_root() {
    for good in ["", "a", "a/b", "..a", "a..", ".a/b.", &"n".repeat(255)] {
        assert!(check_path(&entry(good)).is_ok(), "{good:?}");
    }
    for bad in [
        "/",
        "/a",
        "a/",
        "a//b",
        ".",
        "..",
        "a/..",
        "./a",
        "a\0",
        &"n".repeat(256),
    ] {
        assert!(check_path(&entry(bad)).is_err(), "{bad:?}");
    }
}

#[test]
fn a_base_name_is_the_last_part() {
    assert_eq!(base_name("/etc/motd"), Some("motd"));
    assert_eq!(base_name("etc/"), Some("etc"));
    for none in ["/", "", ".", "..", "a/..", "//"] {
        assert_eq!(base_name(none), None, "{none:?}");
    }
}
