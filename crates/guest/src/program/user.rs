//! Looks a user up in the image's /etc/passwd and /etc/group with Docker's rules: a number needs no
//! entry, a name does; supplementary groups come from /etc/group unless a group is given.
//!
//! 4294967295 is refused, because setresuid(2) treats it as "unchanged" and the program would run
//! as root.

use crate::syscalls::spawn::Ids;
use alloc::{string::String, vec::Vec};

/// Largest passwd or group file that is read, bytes.
pub const MAX_DATABASE: usize = 1024 * 1024;

/// A user that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// User, group, supplementary groups.
    pub ids: Ids,
    /// Home directory; `/` if it is not known.
    pub home: String,
}

/// The name that was not found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unknown {
    /// There is no such user.
    User(String),
    /// There is no such group.
    Group(String),
}

/// Finds `name`, `uid`, `name:group` or `uid:gid` in the two files' contents.
///
/// # Errors
///
/// If a name is in neither file; numbers need not be.
pub fn find(wanted: &str, passwd: &str, group: &str) -> Result<User, Unknown> {
    let (user, wanted_group) = match wanted.split_once(':') {
        Some((user, group)) => (user, Some(group).filter(|group| !group.is_empty())),
        None => (wanted, None),
    };
    let number = id(user);
    let mut entries = passwd.lines().filter_map(PasswdEntry::parse);
    // A name of digits is looked up as a name first.
    let entry = entries
        .clone()
        .find(|entry| entry.name == user)
        .or_else(|| entries.find(|entry| number == Some(entry.uid)));
    let (name, uid, primary, home) = match (&entry, number) {
        (Some(entry), _) => (Some(entry.name), entry.uid, entry.gid, entry.home),
        (None, Some(uid)) => (None, uid, 0, "/"),
        (None, None) => return Err(Unknown::User(user.into())),
    };
    let (gid, groups) = match wanted_group {
        Some(wanted) => (find_group(wanted, group)?, Vec::new()),
        None => (
            primary,
            name.map(|name| memberships(name, primary, group))
                .unwrap_or_default(),
        ),
    };
    let home = if home.is_empty() { "/" } else { home };
    Ok(User {
        ids: Ids { uid, gid, groups },
        home: home.into(),
    })
}

/// Parses the number of a user or group.
fn id(text: &str) -> Option<u32> {
    text.parse().ok().filter(|id| *id != u32::MAX)
}

struct PasswdEntry<'a> {
    name: &'a str,
    uid: u32,
    gid: u32,
    home: &'a str,
}

impl<'a> PasswdEntry<'a> {
    /// Parses `name:password:uid:gid:comment:home:shell` (passwd(5)).
    fn parse(line: &'a str) -> Option<PasswdEntry<'a>> {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        let uid = id(fields.nth(1)?)?;
        let gid = id(fields.next()?)?;
        let home = fields.nth(1).unwrap_or("");
        Some(PasswdEntry {
            name,
            uid,
            gid,
            home,
        })
    }
}

/// Parses `name:password:gid:member,member` (group(5)).
fn parse_group(line: &str) -> Option<(&str, u32, &str)> {
    let mut fields = line.split(':');
    let name = fields.next().filter(|name| !name.is_empty())?;
    let gid = id(fields.nth(1)?)?;
    Some((name, gid, fields.next().unwrap_or("")))
}

fn find_group(wanted: &str, group: &str) -> Result<u32, Unknown> {
    group
        .lines()
        .filter_map(parse_group)
        .find(|(name, ..)| *name == wanted)
        .map(|(_, gid, _)| gid)
        .or_else(|| id(wanted))
        .ok_or_else(|| Unknown::Group(wanted.into()))
}

fn memberships(name: &str, primary: u32, group: &str) -> Vec<u32> {
    group
        .lines()
        .filter_map(parse_group)
        .filter(|(_, gid, members)| {
            *gid != primary && members.split(',').any(|member| member.trim() == name)
        })
        .map(|(_, gid, _)| gid)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\n\
        broken line\n\
        web:x:33:34:Web,,,:/var/www:/usr/sbin/nologin\n\
        1000:x:7:8::/seven:\n\
        nohome:x:9:9:\n";
    const GROUP: &str =
        "root:x:0:\nweb:x:34:\nlogs:x:40:adm, web\nssl:x:41:web,adm\nadm:x:42:adm\n";

    fn ids(uid: u32, gid: u32, groups: &[u32]) -> Ids {
        Ids {
            uid,
            gid,
            groups: groups.to_vec(),
        }
    }

    #[test]
    fn a_user_name_sets_groups_and_home() {
        let user = find("web", PASSWD, GROUP).unwrap();
        assert_eq!(
            user,
            User {
                ids: ids(33, 34, &[40, 41]),
                home: "/var/www".into()
            }
        );
    }

    #[test]
    fn a_number_with_an_entry_is_that_user() {
        assert_eq!(
            find("33", PASSWD, GROUP).unwrap().ids,
            ids(33, 34, &[40, 41])
        );
    }

    #[test]
    fn a_number_without_an_entry_runs_in_group_root_at_slash() {
        let user = find("4711", PASSWD, GROUP).unwrap();
        assert_eq!(
            user,
            User {
                ids: ids(4711, 0, &[]),
                home: "/".into()
            }
        );
    }

    #[test]
    fn a_given_group_replaces_all_others() {
        assert_eq!(
            find("web:adm", PASSWD, GROUP).unwrap().ids,
            ids(33, 42, &[])
        );
        assert_eq!(find("web:7", PASSWD, GROUP).unwrap().ids, ids(33, 7, &[]));
        assert_eq!(find("5:6", PASSWD, GROUP).unwrap().ids, ids(5, 6, &[]));
        assert_eq!(
            find("web:", PASSWD, GROUP).unwrap().ids,
            ids(33, 34, &[40, 41])
        );
    }

    #[test]
    fn a_numeric_user_is_looked_up_by_name_first() {
        assert_eq!(find("1000", PASSWD, GROUP).unwrap().ids, ids(7, 8, &[]));
    }

    #[test]
    fn unknown_users_and_groups_are_named_in_the_error() {
        assert_eq!(
            find("nobody", PASSWD, GROUP),
            Err(Unknown::User("nobody".into()))
        );
        assert_eq!(
            find("web:staff", PASSWD, GROUP),
            Err(Unknown::Group("staff".into()))
        );
        assert_eq!(find("", PASSWD, GROUP), Err(Unknown::User("".into())));
    }

    #[test]
    fn id_minus_one_is_refused_as_user_and_group() {
        let unchanged = "4294967295";
        let user = Err(Unknown::User(unchanged.into()));
        let group = Err(Unknown::Group(unchanged.into()));
        assert_eq!(find(unchanged, PASSWD, GROUP), user);
        assert_eq!(find("web:4294967295", PASSWD, GROUP), group);
        // Entries with this number in the image's own files are ignored as well.
        let passwd = "a:x:4294967295:0::/:\nb:x:5:4294967295::/:\nweb:x:33:34::/:\n";
        let groups = "all:x:4294967295:web\n";
        assert_eq!(find("a", passwd, groups), Err(Unknown::User("a".into())));
        assert_eq!(find("b", passwd, groups), Err(Unknown::User("b".into())));
        assert_eq!(
            find("web:all", passwd, groups),
            Err(Unknown::Group("all".into()))
        );
        assert_eq!(find("web", passwd, groups).unwrap().ids, ids(33, 34, &[]));
    }

    #[test]
    fn an_empty_home_is_slash() {
        assert_eq!(find("nohome", PASSWD, GROUP).unwrap().home, "/");
    }

    proptest! {
        #[test]
        fn any_files_are_searched_without_panic(
            wanted in "[a-z0-9:]{0,8}",
            passwd in "[a-z0-9:\n,]{0,200}",
            group in "[a-z0-9:\n,]{0,200}",
        ) {
            let _ = find(&wanted, &passwd, &group);
        }

        #[test]
        fn every_listed_user_is_found(uids in proptest::collection::vec(0..u32::MAX, 1..20)) {
            let passwd: String = uids.iter().enumerate()
                .map(|(index, uid)| std::format!("u{index}:x:{uid}:{uid}::/h{index}:\n"))
                .collect();
            for (index, uid) in uids.iter().enumerate() {
                let user = find(&std::format!("u{index}"), &passwd, "").unwrap();
                prop_assert_eq!(user.ids, Ids { uid: *uid, gid: *uid, groups: vec![] });
            }
        }
    }
}
