//! Durations of a journal's record, as the command prints them.

use serde::ser::Error as _;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

/// Serialises a value whose fields `NAME_ms` are `NAME_seconds`: the journal's files have
/// milliseconds, and all other output has seconds.
pub(crate) struct InSeconds<'a, T>(pub(crate) &'a T);

impl<T: Serialize> Serialize for InSeconds<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let value = serde_json::to_value(self.0).map_err(S::Error::custom)?;
        converted(value).serialize(serializer)
    }
}

fn converted(value: Value) -> Value {
    match value {
        Value::Array(items) => items.into_iter().map(converted).collect(),
        Value::Object(fields) => {
            let fields = fields.into_iter().map(|(name, value)| field(name, value));
            Value::Object(fields.collect::<Map<_, _>>())
        }
        other => other,
    }
}

fn field(name: String, value: Value) -> (String, Value) {
    let Some(stem) = name.strip_suffix("_ms") else {
        return (name, converted(value));
    };
    let seconds = value.as_f64().map(|milliseconds| milliseconds / 1e3);
    (format!("{stem}_seconds"), seconds.into())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn milliseconds_are_seconds_at_any_depth_and_other_fields_stay() {
        let record = json!({
            "size": 7,
            "specs": [{"io_timeout_ms": 1500, "recovery_timeout_ms": null}],
        });
        let expected = json!({
            "size": 7,
            "specs": [{"io_timeout_seconds": 1.5, "recovery_timeout_seconds": null}],
        });
        assert_eq!(serde_json::to_value(InSeconds(&record)).unwrap(), expected);
    }
}
