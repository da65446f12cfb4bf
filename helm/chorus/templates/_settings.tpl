{{/*
The server's settings, one to one: server.maxBodyBytes is CHORUS_MAX_BODY_BYTES, engine.maxNumSeqs CHORUS_MAX_NUM_SEQS.
null leaves a setting to the server's own default. tests/helm holds values.yaml and service/settings.py together.
*/}}
{{- define "chorus.settings" -}}
{{- $settings := dict
  "CHORUS_ENGINE" .Values.engine.type
  "CHORUS_DEVICE" .Values.device
  "CHORUS_CACHE_DIR" .Values.cache.mountPath
  "CHORUS_SERVED_MODEL_NAME" .Values.model.servedName
  "CHORUS_MODEL" (include "chorus.modelLocation" .)
  "CHORUS_METRICS_COMPAT" .Values.monitoring.compat
  "CHORUS_OTLP_ENDPOINT" .Values.monitoring.otlpEndpoint
  "CHORUS_UPSTREAM_URLS" (join "," .Values.engine.upstream.urls) }}
{{- if .Values.monitoring.traceContent }}
{{- $_ := set $settings "CHORUS_TRACE_CONTENT" "true" }}
{{- end }}
{{- if .Values.apiKeys.existingSecret }}
{{- $_ := set $settings "CHORUS_API_KEYS_FILE" "/etc/chorus/api-keys/keys" }}
{{- end }}
{{- if .Values.responses.existingClaim }}
{{- $_ := set $settings "CHORUS_RESPONSES_STORE" (printf "%s/responses.sqlite" .Values.responses.mountPath) }}
{{- end }}
{{- with .Values.monitoring.port }}
{{- $host := ternary (printf "[%s]" $.Values.server.host) $.Values.server.host (contains ":" $.Values.server.host) }}
{{- $_ := set $settings "CHORUS_METRICS_BIND" (printf "%s:%d" $host (int .)) }}
{{- end }}
{{- range $group := list (omit .Values.engine "type" "upstream" "vllm") .Values.engine.vllm (omit .Values.server "host" "port") }}
{{- range $name, $value := $group }}
{{- $_ := set $settings (printf "CHORUS_%s" ($name | snakecase | upper)) (include "chorus.settingValue" $value) }}
{{- end }}
{{- end }}
{{- range $name, $value := omit .Values.engine.upstream "urls" "apiKeySecret" }}
{{- $_ := set $settings (printf "CHORUS_UPSTREAM_%s" ($name | snakecase | upper)) (include "chorus.settingValue" $value) }}
{{- end }}
{{- range $name, $value := $settings }}
{{- if $value }}
{{ $name }}: {{ $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* Numbers of a values file are floats, and large ones would be written as 1e+09. Empty for null, an empty list and an empty map. */}}
{{- define "chorus.settingValue" -}}
{{- if kindIs "invalid" . }}
{{- else if kindIs "slice" . }}{{ join "," . }}
{{- else if kindIs "map" . }}{{ if . }}{{ toJson . }}{{ end }}
{{- else if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}
{{- else }}{{ . }}
{{- end }}
{{- end }}

{{- define "chorus.modelLocation" -}}
{{- $model := .Values.model }}
{{- if has $model.source (list "hub" "download" "newClaim") }}{{ $model.id }}
{{- else if include "chorus.hasModelVolume" . }}{{ list $model.mountPath $model.path | join "/" | trimSuffix "/" }}
{{- end }}
{{- end }}

{{/* What the schema cannot say. */}}
{{- define "chorus.check" -}}
{{- range .Values.extraEnv }}
{{- if and .value (regexMatch "(?i)(^|_)(TOKENS?|SECRETS?|PASSWORDS?|PASSWD|(API|ACCESS|PRIVATE)_?KEYS?|CREDENTIALS?)(_|$)|^OTEL_EXPORTER_OTLP_(.*_)?HEADERS$" .name) }}
{{- fail (printf "extraEnv %s looks like a secret: give it by valueFrom.secretKeyRef, so that it is not in the Deployment for everybody to read" .name) }}
{{- end }}
{{- end }}
{{- include "chorus.checkEngine" . }}
{{- if and (eq .Values.engine.type "upstream") (ne .Values.model.source "embedded") }}
{{- fail "engine.type upstream has no model here: model.source would mount or load one for nothing" }}
{{- end }}
{{- if and (include "chorus.hasExclusiveClaim" .) (or (gt (int .Values.replicaCount) 1) (ne .Values.autoscaling.type "none")) }}
{{- if .Values.responses.existingClaim }}
{{- fail "responses.existingClaim is one pod's alone, so there can be one pod only" }}
{{- end }}
{{- fail "model.newClaim.accessMode is ReadWriteOnce, so there can be one pod only: use ReadWriteMany or another model.source" }}
{{- end }}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) }}
{{- fail "autoscaling.minReplicas is greater than autoscaling.maxReplicas" }}
{{- end }}
{{- if and .Values.monitoring.traceContent (not .Values.monitoring.otlpEndpoint) }}
{{- fail "monitoring.traceContent needs monitoring.otlpEndpoint: without it there are no traces" }}
{{- end }}
{{- if and .Values.monitoring.serviceMonitor.enabled .Values.monitoring.podMonitor.enabled }}
{{- fail "monitoring.serviceMonitor and monitoring.podMonitor together would count everything twice" }}
{{- end }}
{{- end }}
