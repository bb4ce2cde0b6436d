//! The envelope of each JSON line: the format's version and the type of the object.

use std::io::{self, Write};

use serde::Serialize;

/// The version of the format. It changes where a field goes away or gets another meaning;
/// a new field or a new type does not change it.
const VERSION: u32 = 1;

/// What an object is, as its `type` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, strum::IntoStaticStr)]
#[cfg_attr(test, derive(strum::EnumIter))]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub(crate) enum Type {
    Attachment,
    Detachment,
    Resize,
    /// The NBD devices that `heal` has looked at.
    Heal,
    /// One NBD device that `heal --watch` has looked at.
    HealedDevice,
    /// The sessions that `heal` of an iSCSI source has looked at.
    SessionHeal,
    /// One session that `heal --watch` has looked at.
    HealedSession,
    Targets,
    Exports,
    Recovery,
    Plan,
    /// An event of a volume in `apply`.
    Event,
    /// The result of a change of the file in `apply --watch`.
    FileEvent,
    /// The steps and errors that `apply` leaves.
    Left,
    Status,
    Journal,
    JournalChange,
    Reap,
    Inventory,
    Sessions,
    InitiatorName,
    Uevent,
    UeventsLost,
    Doctor,
    Error,
    /// A line of `-v` or `LUNBD_LOG`.
    Log,
}

#[derive(Serialize)]
struct Envelope<'a, T> {
    v: u32,
    #[serde(rename = "type")]
    of: Type,
    #[serde(flatten)]
    body: &'a T,
}

/// Writes one JSON object and a newline. `body` must be an object without a `v` and a
/// `type`.
pub(crate) fn write(out: &mut impl Write, of: Type, body: &impl Serialize) -> io::Result<()> {
    let v = VERSION;
    // A value that cannot be serialised leaves no part of a line.
    let mut line = serde_json::to_vec(&Envelope { v, of, body })?;
    line.push(b'\n');
    out.write_all(&line)
}

/// Puts the envelope around an object that is text already.
pub(crate) fn around(of: Type, object: &str) -> String {
    let name: &str = of.into();
    let fields = object.strip_prefix('{').unwrap_or(object);
    format!("{{\"v\":{VERSION},\"type\":\"{name}\",{fields}")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use strum::IntoEnumIterator as _;

    use super::*;

    #[test]
    fn an_object_of_text_gets_the_envelope_that_a_value_gets() {
        let body = json!({"level": "INFO", "fields": {"v": 7}});
        let mut written = Vec::new();
        write(&mut written, Type::Log, &body).unwrap();
        let written: Value = serde_json::from_slice(&written).unwrap();
        let expected = json!({"v": 1, "type": "log", "level": "INFO", "fields": {"v": 7}});
        assert_eq!(written, expected);
        let text: Value = serde_json::from_str(&around(Type::Log, &body.to_string())).unwrap();
        assert_eq!(text, expected);
    }

    #[test]
    fn the_schema_has_each_type_and_no_other() {
        let schema = include_str!("../../../docs/lunbd.schema.json");
        let schema: Value = serde_json::from_str(schema).unwrap();
        let types: Vec<Value> = Type::iter()
            .map(|of| json!({"$ref": format!("#/$defs/{}", <&str>::from(of))}))
            .collect();
        assert_eq!(schema["oneOf"], json!(types));
        for of in Type::iter().map(<&str>::from) {
            let properties = &schema["$defs"][of]["properties"];
            assert_eq!(properties["type"]["const"], of);
            assert_eq!(properties["v"]["const"], VERSION);
        }
    }

    #[test]
    fn a_value_that_is_no_object_is_refused() {
        assert!(write(&mut Vec::new(), Type::Log, &[1]).is_err());
    }
}
