{{- define "chorus.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/*
40 characters at most: object names and pod names add to it. A longer one ends with its hash, so that two releases whose
names begin alike do not meet.
*/}}
{{- define "chorus.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) }}
{{- $full = default $full .Values.fullnameOverride }}
{{- if gt (len $full) 40 }}
{{- $full = printf "%s-%s" ($full | trunc 31 | trimSuffix "-") ($full | sha256sum | trunc 8) }}
{{- end }}
{{- $full }}
{{- end }}

{{- define "chorus.serviceAccountName" -}}
{{- default (ternary (include "chorus.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name }}
{{- end }}

{{- define "chorus.releaseLabels" -}}
app.kubernetes.io/name: {{ include "chorus.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* A Deployment's selector can never change: nothing of the values but the name may be in it. */}}
{{- define "chorus.selectorLabels" -}}
{{ include "chorus.releaseLabels" . }}
app.kubernetes.io/component: server
{{- end }}

{{- define "chorus.testLabels" -}}
{{ include "chorus.releaseLabels" . }}
app.kubernetes.io/component: test
{{- end }}

{{- define "chorus.labels" -}}
{{- $own := fromYaml (include "chorus.releaseLabels" .) }}
{{- $own = merge $own (dict
  "app.kubernetes.io/version" (.Chart.AppVersion | toString)
  "app.kubernetes.io/managed-by" .Release.Service
  "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_")) }}
{{- toYaml (merge $own (.Values.commonLabels | default dict)) }}
{{- end }}

{{/* The same and `more`; `own` above all. A key that came twice would be refused by some tools and overwrite in others. */}}
{{- define "chorus.moreLabels" -}}
{{- toYaml (merge (dict) (.own | default dict) (fromYaml (include "chorus.labels" .root)) (.more | default dict)) }}
{{- end }}

{{- define "chorus.image" -}}
{{- $tag := .Values.image.tag | default (ternary (printf "%s-cuda" .Chart.AppVersion) .Chart.AppVersion (eq .Values.device "cuda")) }}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ $tag }}
{{- end }}
{{- end }}

{{- define "chorus.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "chorus.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Explicit in every pod, since a Service named chorus would otherwise inject CHORUS_PORT=tcp://... */}}
{{- define "chorus.addressEnv" -}}
- name: CHORUS_HOST
  value: {{ .Values.server.host | quote }}
- name: CHORUS_PORT
  value: {{ .Values.server.port | quote }}
{{- end }}

{{/* Who fills a volume from the hub before the server starts. */}}
{{- define "chorus.hasDownload" -}}
{{- if has .Values.model.source (list "download" "newClaim") }}true{{ end }}
{{- end }}

{{- define "chorus.hasModelVolume" -}}
{{- if not (has .Values.model.source (list "embedded" "hub")) }}true{{ end }}
{{- end }}

{{/* One pod at a time may hold the claim, so a rollout has to stop the old pod first. */}}
{{- define "chorus.hasExclusiveClaim" -}}
{{- if or .Values.responses.existingClaim (and (eq .Values.model.source "newClaim") (ne .Values.model.newClaim.accessMode "ReadWriteMany")) }}true{{ end }}
{{- end }}

{{- define "chorus.hubEnv" -}}
{{- with .Values.model.hubEndpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- with .Values.model.hubTokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .name }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- end }}

{{- define "chorus.cacheEnv" -}}
{{- $cache := .Values.cache.mountPath }}
- name: HOME
  value: {{ $cache }}/home
- name: XDG_CACHE_HOME
  value: {{ $cache }}/xdg
- name: HF_HOME
  value: {{ $cache }}/hf
- name: TORCHINDUCTOR_CACHE_DIR
  value: {{ $cache }}/inductor
- name: TRITON_CACHE_DIR
  value: {{ $cache }}/triton
- name: TMPDIR
  value: /tmp
{{- end }}

{{- define "chorus.scratchVolumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.tmpSizeLimit }}
- name: cache
  emptyDir:
    {{- with .Values.cache.sizeLimit }}
    sizeLimit: {{ . }}
    {{- else }} {}
    {{- end }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.shmSize }}
{{- end }}

{{- define "chorus.scratchMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: {{ .Values.cache.mountPath }}
- name: shm
  mountPath: /dev/shm
{{- end }}

{{- define "chorus.modelVolume" -}}
{{- $model := .Values.model -}}
- name: model
  {{- if eq $model.source "download" }}
  emptyDir: {}
  {{- else if eq $model.source "newClaim" }}
  persistentVolumeClaim:
    claimName: {{ include "chorus.fullname" . }}-model
  {{- else if eq $model.source "existingClaim" }}
  persistentVolumeClaim:
    claimName: {{ $model.existingClaim }}
    readOnly: true
  {{- else if eq $model.source "hostPath" }}
  hostPath:
    path: {{ $model.hostPath }}
  {{- else if eq $model.source "image" }}
  image:
    reference: {{ $model.image.reference }}
    pullPolicy: {{ $model.image.pullPolicy }}
  {{- end }}
{{- end }}

{{- define "chorus.metricsPort" -}}
{{- ternary "metrics" "http" (not (empty .Values.monitoring.port)) }}
{{- end }}

{{- define "chorus.metricsAuthorization" -}}
{{- with .Values.monitoring.apiKeySecret }}
{{- if and .name (not $.Values.monitoring.port) }}
authorization:
  type: Bearer
  credentials:
    name: {{ .name }}
    key: {{ .key }}
{{- end }}
{{- end }}
{{- end }}

{{/* Seconds from the pod's end being decided to the server being gone for certain, and 15 more. */}}
{{- define "chorus.gracePeriod" -}}
{{- $needed := add .Values.drain.preStopSeconds (ceil .Values.server.drainSeconds) 10 15 }}
{{- $chosen := .Values.terminationGracePeriodSeconds | default $needed }}
{{- if lt (int $chosen) (int $needed) }}
{{- fail (printf "terminationGracePeriodSeconds is %d, but drain.preStopSeconds + server.drainSeconds + 10 + 15 = %d: requests would be cut" (int $chosen) (int $needed)) }}
{{- end }}
{{- int $chosen }}
{{- end }}
